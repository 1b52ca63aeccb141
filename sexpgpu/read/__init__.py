"""Text to forms and back."""
