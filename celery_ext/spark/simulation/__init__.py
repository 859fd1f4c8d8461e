"""How late a load would be, and what it would take."""
