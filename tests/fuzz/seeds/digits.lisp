;; A small classifier with most def-forms in it.
(import "nn" "optim" "loss" "schedule")

(defknob hidden 16 "units" :min 1)
(defknob lr 1e-3 "learning rate" :min 0)
(defknob batch 8)
(defknob kind 'relu "activation" :one-of (relu tanh))

(defvariant wide :hidden 32 :lr 5e-4)

(defdata digits
  (csv "d.csv" :fields ((image f32 [64] :scale 1/16) (label i32)))
  :split ((train 4/5) (valid 1/5)))

(defmacro skipping (x layer)
  `(let ((skip ,x)) (+ skip (,layer skip))))

(defun activate (x)
  (case kind
    (relu (relu x))
    (else (tanh x))))

(deflayer mixer (x)
  "Keeps the width."
  (let ((d (dim x -1)))
    (tap "norm" (sqrt (mean (* x x))))
    (activate (linear x d :name "mix"))))

(deflayer model (image)
  (let* ((x (linear image hidden :name "in"))
         (x (reduce (lambda (x i) (skipping x mixer)) (range 2) :initial-value x)))
    (linear (dropout x 0.1) 10 :name "out")))

(defun digit-loss (image label)
  (cross-entropy (model image) label))

(defun digit-accuracy (image label)
  (mean (cast (= (argmax (model image) :axis -1) label) f32)))

(defrun train
  :data (batches digits :split train :batch batch :shuffle true)
  :loss digit-loss
  :optimizer (adamw :lr (warmup-cosine :peak lr :warmup 2 :steps 20) :betas [0.9 0.95])
  :metrics ((accuracy digit-accuracy))
  :clip-norm 1.0
  :steps 20
  :seed 1
  :diagnostics ("mixer/*"))

(defeval valid
  :data (batches digits :split valid :batch 4)
  :every 10
  :metrics ((loss digit-loss) (accuracy digit-accuracy)))
