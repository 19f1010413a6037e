"""One copy of the parameters on each host: where they lie, who writes them, what a lost rank leaves behind.

Not public.
"""
