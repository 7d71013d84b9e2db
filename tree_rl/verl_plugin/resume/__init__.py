"""Exact resumption after a restart; a job that lost a process ends."""
