"""What a confined workspace is made of: file work by descriptor, its user, its processes and its commands."""
