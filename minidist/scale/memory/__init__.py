"""Where the memory of training goes, and what fits in it; `python -m minidist.scale.memory` prints that."""

from minidist.parallel.contract.memory_report import Memory as Memory
from minidist.scale.memory.bar_chart import plot as plot
from minidist.scale.memory.estimates import Estimate as Estimate
from minidist.scale.memory.estimates import estimate as estimate
from minidist.scale.memory.largest_batch import Fit as Fit
from minidist.scale.memory.largest_batch import fits as fits
