"""`tree-rl bench --against packed`: the same rows over trees and packed end to end, without verl."""
