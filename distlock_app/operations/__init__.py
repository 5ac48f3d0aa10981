"""What the admin and `manage.py distlock` do: read, diagnose, run a program, keep a history."""
