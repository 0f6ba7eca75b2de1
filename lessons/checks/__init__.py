"""What a lesson's notebook uses: checks with their hints, progress, figures, animations, warm ranks.

`exercises.py` has `check`, `hint` and `or_solution`; `answers.py` calls the reader's function and stops it in
time; `verdicts.py` says what is wrong in the reader's terms; `ranks.py` runs an answer on ranks;
`unanswered.py` sees that a stub is still a stub; `progress.py` keeps what passed; `figures.py` and
`animations.py` draw; `notebooks.py` makes each .ipynb from its .py. Beside them stands one module a lesson,
named as the lesson is: `ranks_that_talk.py` for lessons/08_ranks_that_talk.py. `settings/` has, under the
same names, what the ranks set up around a reader's function, so that a check sees more than its result.
"""
