"""The table of strategies: every kind of training on one model, in turns with other libraries' loops.

strategies             its rows and their peers, as data
strategy_rounds        measures a family of rows in rounds
strategy_steps         what a rank does in a round
strategy_loops         strategies that need a loop of their own
programs               a training loop that is timed and whose memory is counted
peers                  the loops of other libraries
peers_model_parallel   torch's tensor parallelism and pipelines
peer_packages          Accelerate and DeepSpeed
"""
