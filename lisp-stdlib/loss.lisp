;;; Losses: scalars over the samples of a batch.

(defun cross-entropy (logits labels)
  "Mean of -log softmax(logits)[label] over all rows. logits [… classes], labels i32 [… ]."
  (mean (softmax-cross-entropy logits labels)))

(defun mean-squared-error (prediction target)
  "Mean of the squared difference; shapes must be equal or broadcast."
  (let ((d (- prediction target)))
    (mean (* d d))))
