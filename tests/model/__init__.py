"""Two protocols as models whose every state is explored (docs/explanation/model.md)."""
