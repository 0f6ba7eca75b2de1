"""Pipeline schedules, under the path that lessons and programs import; see `pipeline/schedules.py`."""

from minidist.parallel.pipeline.schedules import (
    SCHEDULES as SCHEDULES,
)
from minidist.parallel.pipeline.schedules import (
    Event as Event,
)
from minidist.parallel.pipeline.schedules import (
    Instruction as Instruction,
)
from minidist.parallel.pipeline.schedules import (
    Schedule as Schedule,
)
from minidist.parallel.pipeline.schedules import (
    Simulation as Simulation,
)
from minidist.parallel.pipeline.schedules import (
    by_name as by_name,
)
from minidist.parallel.pipeline.schedules import (
    check as check,
)
from minidist.parallel.pipeline.schedules import (
    forward_only as forward_only,
)
from minidist.parallel.pipeline.schedules import (
    gpipe as gpipe,
)
from minidist.parallel.pipeline.schedules import (
    interleaved as interleaved,
)
from minidist.parallel.pipeline.schedules import (
    one_f_one_b as one_f_one_b,
)
from minidist.parallel.pipeline.schedules import (
    plot as plot,
)
from minidist.parallel.pipeline.schedules import (
    simulate as simulate,
)
from minidist.parallel.pipeline.schedules import (
    with_messages as with_messages,
)
from minidist.parallel.pipeline.schedules import (
    zero_bubble as zero_bubble,
)
