"""One copy of the parameters on each host: where they lie, who writes them, what a lost rank leaves behind.

May import the files beside this folder. Not public.
"""
