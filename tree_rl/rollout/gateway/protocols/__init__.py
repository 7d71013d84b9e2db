"""What clients speak. One module or folder per protocol; `exchange.ChatProtocol` says which functions each has."""
