"""Hydra composes verl's config in many tests here, out of a hundred files: libyaml reads them in half the time."""

import yaml

# OmegaConf derives its loader from this name at every file; both classes share what builds Python's values.
yaml.SafeLoader = yaml.CSafeLoader
