"""Training steps in turns: every kind of training here, and the loops of other libraries.

what_is_trained        model, rows, optimizer; the loop that torch's users write
programs               a training loop that is timed and whose memory is counted; ours
peers                  the loops of torch, Accelerate and DeepSpeed
pipelines              our schedules and torch's, and what each rank does when
strategies             the table of strategies, as data
rounds                 measures programs in turns, on warm ranks
plain_ladder           the training ladder as a table, with the engine's forms of its rungs
plain_programs         a rung as a program
"""
