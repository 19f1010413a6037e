"""The wrapper of a model for any framework: its arguments, and the methods that users call.

Framework-free. Not public.
"""
