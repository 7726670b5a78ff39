"""The goldens: 60 calls with results recorded from FlashKDA on an H200, shipped as an input generator and digests.

Needs numpy, and `run` needs torch; nothing else of the package imports this folder.
"""
