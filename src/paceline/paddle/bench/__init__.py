"""What `paceline bench` runs in processes that have Paddle. May import everything below `paceline.paddle`.

Not public.
"""
