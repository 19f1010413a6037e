"""The contenders of `paceline bench` that need torch. Runs inside the bench's worker processes.

May import everything of Paceline; nothing but the bench imports it. Not public.
"""
