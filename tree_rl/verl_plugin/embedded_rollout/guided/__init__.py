"""What the embedded engine may draw, where a request constrains it."""
