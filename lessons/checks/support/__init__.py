"""What the lessons' checks build on.

`exercises.py` has `check`, `hint` and `or_solution`; `answers.py` calls the reader's function and stops it in
time; `verdicts.py` says what is wrong in the reader's terms, and `diagnosis.py` why; `unanswered.py` sees
that a stub is still a stub; `progress.py` keeps what passed; `animations.py` draws; `notebooks.py` makes each
.ipynb from its .py. The others are parts of a few lessons' checks.
"""
