"""Pictures of runs from their metrics files: `series` says what is drawn, `figure` draws it."""
