"""A restart continues as if nothing had happened; a job that lost a process ends."""
