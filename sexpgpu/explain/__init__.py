"""What the compiler did with a file, as plain data and as text; nothing here imports torch."""
