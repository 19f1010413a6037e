"""`DataParallel`: several devices of one process. Imports `model`. Not public."""
