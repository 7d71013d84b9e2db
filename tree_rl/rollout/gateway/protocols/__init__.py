"""The clients' protocols, one module or folder each; `exchange.ChatProtocol` defines the functions of each."""
