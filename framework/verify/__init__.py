"""Whether a user's own task is right: checks of the step, its inputs and its config, on the CPU.

report.py    what a check found: a table, JSON
bench.py     the user's Trainer on 1 to N logical CPUs, one step at a time
noise.py     the same noise for every row, so that a random task can be compared
replicas.py  the same update on 1 and on N replicas, and what explains it where it is not
"""
