"""`DataParallel`: several devices of one process. Imports `model`."""
