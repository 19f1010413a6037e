"""The wrapper of a model, for any framework: its arguments, checked, and what users may ask of it.

Framework-free. Not public.
"""
