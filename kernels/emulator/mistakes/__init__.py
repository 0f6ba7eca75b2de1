"""Rungs with a mistake planted in them, which the emulator has to find, and which a GPU may hide.

| File | Holds |
|---|---|
| planted.txt | the mistakes: small changes of the ladder's files, and the check that finds each |
| patches | how a change is written, and applied |
| mutants | builds a rung with a mistake, and puts it to the checks |
| silicon | twenty of them a thousand times on a GPU: how often does the fault show there? |
"""
