"""Files that others write: texts of trainers, logs of model calls."""
