"""Environments of other libraries, one adapter each; a library is imported only where its adapter is."""
