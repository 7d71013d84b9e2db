"""The convolution by torch alone, on any device."""
