"""Pipeline schedules, their proof, simulation and picture, and their execution."""
