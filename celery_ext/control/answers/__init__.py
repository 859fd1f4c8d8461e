"""Tasks that ask an outside system and end before the answer arrives.

    expect(payment.id, timeout="2h", on_response=book.s(), on_timeout=remind.s())
    respond(app, payment.id, {"paid": True})

The task of `waiting_task.py` waits in the broker in their place.
"""
