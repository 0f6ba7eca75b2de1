"""The training ladder, `minidist.plain`, beside the engine.

plain_ladder           its rungs, and which form of the engine belongs to each, as data
plain_forms            the engine's forms, for the ladder's GPT
plain_steps            runs a rung as it stands, times its steps and counts its memory
"""
