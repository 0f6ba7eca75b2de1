"""The command `minidist`. It is the top floor: it imports the library, and nothing imports it.

Modules with a command import torch only when the command runs.

| File | Holds |
|---|---|
| commands.py | the commands train and doctor; the list of all commands; exit codes |
| compare.py, trace.py, bench.py, report.py, plan.py, dryrun.py, lessons.py | one command each |
| lessons_export.py | the lessons as assignments for nbgrader and Otter-Grader |
| own_model.py | the functions of a model of your own, which options name |
| options.py, output.py | options that commands share; what they print |
| train_config.py | the description of a training, its model and its data |
| train.py, resuming.py | the training that `minidist train` runs; its checkpoints |
| compare_layouts.py, traced_step.py | what `minidist compare` and `minidist trace` run |
| doctor.py | what `minidist doctor` looks at, and its table |
| doctor_probe.py, doctor_parts.py | what it loads in another process; what it says of that |
| doctor_gpu.py | `minidist doctor --gpu`: whether the CUDA ladder will run |
"""

from minidist.cli.commands import app as app
from minidist.cli.commands import main as main
