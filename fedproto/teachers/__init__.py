"""Closed-form teachers, one file each: what a server solves from sums; see core/closed_form.py."""
