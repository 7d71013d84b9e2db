"""What clients speak. One file per protocol; `exchange.ChatProtocol` says which functions each has."""
