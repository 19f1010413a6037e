"""An optimizer's step that the ranks share: who updates which elements, and what they compare before.

Framework-free. Not public.
"""
