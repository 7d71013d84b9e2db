"""One optimisation step over trees, in torch alone: plan on device, tree run, row-alone oracle, objectives."""
