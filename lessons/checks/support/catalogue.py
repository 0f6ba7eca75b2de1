"""The lessons, in order."""

TITLES = (
    "Your machine",
    "Matmul on a CPU",
    "CPU, GPU, TPU",
    "CUDA from Python",
    "Shared memory and tiles",
    "Register tiles",
    "Tensor cores",
    "A network on your own matmul",
    "Ranks that talk",
    "Data parallel",
    "Buckets and overlap",
    "Waiting or not",
    "Cutting the model",
    "Tensor and sequence parallel",
    "ZeRO 1, 2, 3",
    "All together",
    "Bugs that the loss does not show",
    "Attention without the square",
)
