"""The checks that a lesson's notebook imports, with their hints, figures, warm ranks, kernels and links.

One module a lesson, named as the lesson is, has its checks: `ranks_that_talk.py` for
lessons/08_ranks_that_talk.py. `settings/` has, under the same names, what the ranks set up around a reader's
function, so that a check sees more than its result. `ranks.py` runs an answer on ranks; `figures.py` and
`pictures/` draw; the others make what some lessons measure. `support/` has what these build on.
"""
