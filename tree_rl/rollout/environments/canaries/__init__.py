"""Tests that must fail, inserted among a task's tests, so that code under test cannot fake all results."""
