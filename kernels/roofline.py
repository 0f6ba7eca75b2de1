"""The import path of the roofline that lessons and programs use; the code is in `measure/roofline.py`."""

from .measure.roofline import Cores, attainable, main, measure, place, plot, point

__all__ = ["Cores", "attainable", "main", "measure", "place", "plot", "point"]
