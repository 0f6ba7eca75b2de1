"""What collectives cost: the alpha-beta-gamma model, its fit to running ranks, the figures of known links."""

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
