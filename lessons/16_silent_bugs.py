# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16. Bugs that the loss does not show
#
# **Time:** about 2.5 hours. **Builds on:** lesson 09; lessons 13 to 15 explain four of the pages.
#
# Parallel training fails silently: the loss goes down, and something is wrong. In this lesson you get six pages
# of working code. Each trains, each has a mistake that somebody has really made, and none of the six shows in
# the loss. You choose what to look at, find the line, and mend it. It is a game with a score.

# %%
import torch

from checks.figures import ladder, said
from checks.hunting import PRICES
from checks.pictures import evidence
from checks.silent_bugs import another, check, hint, hunt, or_solution, scoreboard
from minidist.parallel.debugging.detectors import ask
from minidist.plain.mistakes import collection
from minidist.plain.mistakes.examine import DETECTORS, subject

torch.set_num_threads(1)
ladder(16)

# %% [markdown]
# **The question.** A training on many ranks ends without an error, and its loss curve looks like the one that
# you know. How would you notice that it is wrong, and how do you find the line?
#
# ## Predict, then measure
#
# Begin with a mistake that you do not have to hunt. Two ranks share the rows of each batch, and add up their
# gradients. Somebody has read that a sum over ranks needs a factor:

# %%
factor = collection()["gradient-n-times"]
print(factor.diff)

# %% [markdown]
# With two ranks every gradient is now twice too large, in every step. The optimizer is AdamW. By how many
# percent does the loss differ from that of one process after 100 steps?

# %%
prediction = None  # your guess in percent, such as 20

# %%
trainings = subject(factor)  # on two ranks, and what they have to equal
found, right = (each["long"].losses for each in (trainings.found, trainings.whole))
evidence.losses(found, right)
percent = abs(sum(found[-10:]) / sum(right[-10:]) - 1) * 100
print(f"The last ten losses differ by {percent:.1g} %; {said(prediction)}.")

# %% [markdown]
# Adam divides each gradient by the gradient's own size, so that a factor leaves no trace in the loss. But it is
# a mistake: clipping sets in too early, and with plain SGD the training diverges. The loss is a bad witness. It
# is one number, it is noisy, and it goes down even when much is broken.
#
# ## Detectors
#
# Here are other things to look at. Each **detector** compares a run on two ranks with what it has to equal:
# with one process, or with the bytes, the work and the memory that a right page takes. All but the first train
# a handful of steps, in float64, so that even a small difference means something. This is what they say of the
# factor:

# %%
for name, one in ask(trainings, DETECTORS).items():
    print(f"{name:12} {one.sentence or '-'}")

# %% [markdown]
# Three detectors see it, and one of them is cheap: the norm, one number for each rank. Each detector has a
# price in points. The loss is the dearest, since it takes 100 steps and says least.

# %%
for name, price in PRICES.items():
    print(f"{price:3} points  {name:12} {DETECTORS[name].__doc__}")

# %% [markdown]
# ## The game
#
# Each case begins with 100 points; every detector that you ask takes its price, and every hint takes 10. A
# wrong line takes 20, and so does a mend that the check refuses; one that does not run costs nothing. What is
# left when your mend passes is yours, and only the first time counts.
#
# You play with three calls:
#
# ```
# case.ask("norm")     # what a detector says; case.ask() prints the prices
# case.blame(31)       # does it go wrong in line 31?
# check(case_1)        # does your mend pass?
# ```
#
# A **mend** is a dictionary, from lines to new text. `{31: "x = 2 * x"}` puts the text in the place of line 31.
# Instead of a number you may give the line's own text. The new text may have several lines (`"a = 1\nb = 2"`),
# and an empty text removes the line. Text that begins without spaces gets the indentation of the line that it
# replaces; other text stays as it is.
#
# The check does not compare your text with anything. It trains your page with other weights and other data, on
# two ranks and on four. Your page has to equal one process, and must not send, compute or hold more than it has
# to. Any mend that does so is right. A mend that only hides the mistake does not pass, and the check says why.
#
# All pages without a mistake are in [`minidist/plain`](../minidist/plain/). Comparing a page with its file
# finds every mistake in a second, and teaches you nothing: in your own training there is no such file.
#
# ## Case 1
#
# The page is data parallelism, as in lesson 09. Read the report, then the page. The first case shows you the
# way.

# %%
case = hunt(1)

# %% [markdown]
# "Not even the first": the first loss is computed before any gradient is, so that a wrong first loss leaves few
# lines to suspect. The detector costs 5 points. (Leave this cell out if you see the line without it.)

# %%
case.ask("first loss")

# %% [markdown]
# The user is right. The difference is in the third digit, and rounding is in the sixteenth. Which line makes
# the first loss? `case.blame(...)` with its number tells whether you are right. Remember that the two ranks
# share a batch of 11 rows.

# %%
# case.blame(31)

# %% [markdown]
# **Exercise 16.1: case_1.** Return the mend of the first page.


# %% tags=["exercise"]
def case_1():
    """Return the mended lines: {line: text}."""
    ...  # about 1 line


# %%
check(case_1)

# %% [markdown]
# `hint()` in a cell of its own gives the first of three hints, for 10 points each. The next cell closes the
# case, with no points while no mend has passed. It says what the mistake was, where it has been published, and
# what every detector would have said.

# %%
case_1 = or_solution(case_1)
case.debrief()

# %% [markdown]
# ## Case 2
#
# Tensor parallelism with sequence parallelism, as in lesson 13: inside a pair of matrices a rank has a part of
# the matrices, and between the pairs it has a part of the tokens. From here on you choose.

# %%
case = hunt(2)

# %%
case.ask()  # case.ask("gradients") asks one detector, and so on

# %% [markdown]
# **Exercise 16.2: case_2.** Return the mend of the second page.


# %% tags=["exercise"]
def case_2():
    """Return the mended lines: {line: text}."""
    ...  # about 1 line


# %%
check(case_2)

# %%
case_2 = or_solution(case_2)
case.debrief()

# %% [markdown]
# ## Case 3
#
# Sharded data parallelism, as in lesson 14. The training runs with the last row of the table, ZeRO 3.

# %%
case = hunt(3)

# %%
case.ask()

# %% [markdown]
# **Exercise 16.3: case_3.** Return the mend of the third page.


# %% tags=["exercise"]
def case_3():
    """Return the mended lines: {line: text}."""
    ...  # about 5 lines


# %%
check(case_3)

# %%
case_3 = or_solution(case_3)
case.debrief()

# %% [markdown]
# Every number that this training computes is right. A test that compares results, however strict, passes.
#
# ## Case 4
#
# Ring attention: each rank has a part of every row's tokens, and blocks of keys and values travel around a
# ring, as in lesson 08. Tokens see only the tokens before them. So a block of later tokens only passes through.

# %%
case = hunt(4)

# %%
case.ask()

# %% [markdown]
# **Exercise 16.4: case_4.** Return the mend of the fourth page.


# %% tags=["exercise"]
def case_4():
    """Return the mended lines: {line: text}."""
    ...  # about 6 lines


# %%
check(case_4)

# %%
case_4 = or_solution(case_4)
case.debrief()

# %% [markdown]
# ## Case 5
#
# Experts: each rank holds some of the small networks of a block, and a router sends every token to one of them.
# All other parameters are the same on all ranks. At the end of a step the gradient is clipped: if its norm is
# above 0.5, all of it is scaled down to 0.5.

# %%
case = hunt(5)

# %%
case.ask()

# %% [markdown]
# **Exercise 16.5: case_5.** Return the mend of the fifth page.


# %% tags=["exercise"]
def case_5():
    """Return the mended lines: {line: text}."""
    ...  # about 1 line


# %%
check(case_5)

# %%
case_5 = or_solution(case_5)
case.debrief()

# %% [markdown]
# ## Case 6
#
# The last page adds to data parallelism what a real training has besides: epochs, micro-batches, padding,
# dropout, bfloat16, clipping, a warm-up, and checkpoints. Its mistake is in one of them.

# %%
case = hunt(6)

# %%
case.ask()

# %% [markdown]
# **Exercise 16.6: case_6.** Return the mend of the sixth page.


# %% tags=["exercise"]
def case_6():
    """Return the mended lines: {line: text}."""
    ...  # about 1 line


# %%
check(case_6)

# %%
case_6 = or_solution(case_6)
case.debrief()

# %% [markdown]
# ## Your score
#
# Par is what is left to somebody who asks a single detector in each case, the right one. Whoever sees a line
# without asking beats it.

# %%
scoreboard()

# %% [markdown]
# Not at par? There are eighty more mistakes where these came from. The next cell draws one; its report is
# what a user saw. Hunt it in the same way, and mend it with `case.mend({31: "new text"})`. A number, as in
# `another(7)`, draws the same one for you and for a friend.

# %%
case = another(7)

# %% [markdown]
# [Which detector finds which mistake](../docs/mistakes.md) is a table of them all. Read it after you have
# played. Parameters, in float64, after four steps, find most of them, and still miss every mistake that only
# costs memory, work or bytes, and every one that needs a restart. No detector finds them all.
#
# ## What breaks in practice, and how one sees it
#
# - **A mean of means.** Ranks have different numbers of rows or tokens, and each takes its own mean. Libraries
#   had it for years. Compare the first loss with that of one process, on uneven rows.
# - **A parameter that nobody adds up.** A norm in a sequence-parallel region, a router, a head that was added
#   late. Compare gradients by parameter: the names that differ tell you which layer it is.
# - **A norm of a part.** Clipping hides it, because only the factor is wrong. Look at the norm on every rank,
#   and compare it with one process.
# - **Right results that cost too much.** Only counting finds it: bytes, multiplications, memory. Write down
#   what a step should cost before you measure.
# - **A restart that is a new training.** Stop a small run in the middle, go on, and compare to the bit: the
#   generators of all ranks, the place in the data, the schedule.
# - **A mend that hides.** Broadcasting weights that have drifted apart makes ranks agree, and the training
#   stays wrong. Mend the line that is wrong, and let the test be equality with one process.
#
# ## Further reading
#
# - Jiang et al., *Training with Confidence: Catching Silent Errors in Deep Learning Training with Automated
#   Proactive Checks*, 2025: twenty real silent errors, and rules that are inferred from runs that are right.
# - Hugging Face, *Fixing Gradient Accumulation*, 2024: the first case of this lesson, in a library that very
#   many people train with.
# - Karpathy, *A Recipe for Training Neural Networks*, 2019: why training fails silently, and a way of working
#   that takes this for granted.
#
# ## Where your lines live
#
# Your mends stand in the rungs of [the training ladder](../minidist/plain/__init__.py), and in its recipe:
#
# | You wrote | The page |
# |---|---|
# | `case_1` | plain/data_parallel.py: [`train`](../minidist/plain/data_parallel.py) |
# | `case_2` | plain/sequence_parallel.py: [`train`](../minidist/plain/sequence_parallel.py) |
# | `case_3` | plain/sharded.py: [`Unit.forward_done`](../minidist/plain/sharded.py), [`Unit.gradient_arrived`](../minidist/plain/sharded.py) |
# | `case_4` | plain/ring_attention.py: [`RingSoftmax`](../minidist/plain/ring_attention.py) |
# | `case_5` | plain/experts.py: [`train`](../minidist/plain/experts.py) |
# | `case_6` | plain/mistakes/recipe.py: [`train`](../minidist/plain/mistakes/recipe.py) |
#
# The detectors are not made for these pages. [`detect`](../minidist/parallel/debugging/detectors.py) asks all
# but the last two about a training of any library: give it a function that trains on ranks, and one that trains
# in one process. [The page of mistakes](../docs/mistakes.md) shows it with torch's DDP.
#
# Next: your own training. Run the detectors before you believe its loss.
