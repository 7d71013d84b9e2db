"""What clients speak. One file per protocol; `chat_protocol` says which functions each has."""
