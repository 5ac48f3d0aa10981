"""The backends: what a `BACKEND` in the setting `DISTLOCK` names, one module or package each."""
