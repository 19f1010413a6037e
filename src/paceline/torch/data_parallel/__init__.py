"""`DataParallel`: several devices of one process. Not public."""
