"""Faults under load, a history of what happened, and a checker: see docs/explanation/faults.md.

python -m tests.faults --seconds 600 --engines redis,default,redlock --processes 16 --seed 1
"""
