"""Predict how long collectives take: the alpha-beta-gamma model, its fit to running ranks, known networks.

`fit` measures alpha, beta and gamma between ranks, `PROFILES` has those of known networks, and `predict`
gives the seconds of a collective from either.

- `model.py`: rounds, bytes and sums of each algorithm, and the time that they take
- `links.py`: links, shared memory, and the profiles of known networks
- `fitting.py`: measure the links between the ranks that run
"""

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.comm.cost.fitting import fit as fit
    from minidist.comm.cost.links import PROFILES as PROFILES
    from minidist.comm.cost.links import LinkProfile as LinkProfile
    from minidist.comm.cost.model import FORMULAS as FORMULAS
    from minidist.comm.cost.model import SEGMENT as SEGMENT
    from minidist.comm.cost.model import Formula as Formula
    from minidist.comm.cost.model import Terms as Terms
    from minidist.comm.cost.model import crossover as crossover
    from minidist.comm.cost.model import predict as predict
    from minidist.comm.cost.model import terms as terms

__getattr__, __dir__, __all__ = lazy(__name__)
