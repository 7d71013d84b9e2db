"""Brings the plugin, in one version, into every process of a job."""
