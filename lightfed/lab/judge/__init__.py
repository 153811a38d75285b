"""`lightfed judge`: whether a new method is conforming, and better than a known one."""
